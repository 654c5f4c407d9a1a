"""Methods of data-parallel training: their steps to a target loss, and the seconds of a step on each link."""
