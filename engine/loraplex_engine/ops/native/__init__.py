"""The fast CPU form: a small C++ library, built on first use (`build`) and called through torch.library (`cpu`)."""
