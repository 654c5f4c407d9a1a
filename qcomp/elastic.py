"""Elastic steps: ranks may die, leave and join, and the others go on."""

from qcomp.core.elastic.recovery import Elastic, ElasticState, Snapshot

__all__ = ["Elastic", "ElasticState", "Snapshot"]
