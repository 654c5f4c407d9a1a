"""The replicas of `churn.py`."""
