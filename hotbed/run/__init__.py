"""Settings and folders of a run: run files and flags -> RunConfig; RUN/ and its content."""
