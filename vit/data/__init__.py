"""Load batches from shards. Each step is listed with the functions that implement it:

1. Open    index of a split, files of its shards           storage.opening.open_split
           samples chosen by the config, several sources   select.choose, sources.Sources
2. Order   batch position -> sample numbers of its rows    order.Order.rows_and_copies
3. Read    sample number -> encoded bytes                  shards.split.Split.read
           from a folder, a server, or a local cache       shards.local_tars, storage.cached_tars
4. Draw    (seed, epoch, sample) -> crop, parameters       augment.draw.draw_crops, draw_table
5. Decode  bytes, crop -> uint8 pixels of the view         decode.crops.decode_views
6. Batch   rows of one batch, in shared memory             batches.TrainBatches.fill, slots.Slots
7. Load    workers, waiting, copies to the GPU             loader.Loader, worker_pool.WorkerPool
8. Augment on the device, with these parameters            augment.apply.Augment
"""
