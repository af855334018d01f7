"""Measurements, and the facts about the machine that belong beside each."""
