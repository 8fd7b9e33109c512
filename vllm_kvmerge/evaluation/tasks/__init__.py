"""What a model is asked in an evaluation; one module per benchmark."""
