"""Which leaf goes first. One policy a file; `candidates` keeps the coldest few in order so that choosing is cheap."""
