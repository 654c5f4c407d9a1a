"""Elastic training: the remaining ranks go on if ranks die or leave, and new ranks may join."""

from qcomp.core.elastic.recovery import Elastic, ElasticState, Snapshot

__all__ = ["Elastic", "ElasticState", "Snapshot"]
