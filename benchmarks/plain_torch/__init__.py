"""The same models with nn.Embedding and torch.optim: the baseline for accuracy and speed, written without hotbed's tables."""
