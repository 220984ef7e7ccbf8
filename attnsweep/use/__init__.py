"""Winners in a model: which attention calls a program makes."""
