"""Apps in other languages: built, run and held against the same bundles."""
