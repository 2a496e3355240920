"""Tests of this module."""
