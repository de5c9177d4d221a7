"""The event store of a pool: takes the sources' batches, consolidates them, keeps the journal, serves it to routers."""
