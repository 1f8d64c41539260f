"""Train from a stream of tars without random access (`data.reader: webdataset`)."""
