"""The pure part of `qcomp.elastic`: how ranks agree on a snapshot after others have died, and resume from it."""
