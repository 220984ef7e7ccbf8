"""Commands about one config, one run or this machine."""
