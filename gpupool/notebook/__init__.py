"""The face: magics and views. The only folder that knows IPython's display and ipywidgets."""
