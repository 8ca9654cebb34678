"""Folders of a run: at URLs, temporary ones, and the claims to them."""
