"""The compressed mean over ranks: its messages, topologies and residuals, and the means of matrices."""
