"""Raw click logs -> a dataset directory."""
