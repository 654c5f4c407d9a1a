"""Outer loops: ranks train alone for some steps, then average what these steps did."""
