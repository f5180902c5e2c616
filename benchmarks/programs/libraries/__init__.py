"""Programs that call functions of installed libraries: one module for each library."""
