"""Train from a stream of tars without random access (`stream.urls`)."""
