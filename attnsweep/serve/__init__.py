"""Winners in a model: the calls that a program makes, and the operator that serves them."""
