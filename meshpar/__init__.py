"""meshpar: declare a mesh and a name for each dim; train on any layout of devices, with the same numbers."""
