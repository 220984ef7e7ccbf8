"""Did a kernel get slower? Code against code, and run against run."""
