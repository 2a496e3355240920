"""Many runs with different settings, and what they say."""
