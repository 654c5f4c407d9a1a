"""Methods of data-parallel training on their way to a loss: steps to it, and seconds of a step on each link."""
