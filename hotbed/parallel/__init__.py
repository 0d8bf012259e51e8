"""Many ranks: the mesh they form, and the exchanges between them."""
