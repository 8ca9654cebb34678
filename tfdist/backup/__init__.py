"""Backups: an interrupted training run resumes at the exact step."""
