"""The variance of Adam: when it is frozen, and what may change it afterwards."""
