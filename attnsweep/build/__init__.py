"""From a config to compiled, analysed stages and what their results must be; needs no GPU."""
