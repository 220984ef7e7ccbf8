"""What calls the user's launchers on tensors that are not there, in processes without a GPU."""
