"""Training from a stream of tars that cannot be read at random (`data.reader: webdataset`)."""
