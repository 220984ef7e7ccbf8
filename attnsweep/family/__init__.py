"""A kernel family's declaration: parameters, rules, stages, and how a call is issued."""
