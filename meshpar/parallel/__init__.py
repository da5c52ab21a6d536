"""The operations of parallel programs: context, experts, pipelines, gathers of parameters, products in chunks."""
