"""Token ids that `meshpar data build` has encoded: written in shards by several processes, and read in place."""
