"""Hopper."""
