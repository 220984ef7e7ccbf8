"""What a kernel family says of itself: parameters, rules, stages, and how a call is issued."""
