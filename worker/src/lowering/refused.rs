use crate::nn::ModelError;

/// Why a network cannot run on a GPU.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The layer has no form.
    #[error("layer `{layer}` ({kind}) comes from a user's program and runs on CPUs only")]
    Own { layer: String, kind: &'static str },
    /// No kernel computes the form.
    #[error("layer `{layer}` ({kind}) runs on CPUs only: {what} cannot be computed on GPUs yet")]
    Missing { layer: String, kind: &'static str, what: String },
    /// The form does not match the graph.
    #[error(
        "layer `{layer}` ({kind}): got the form `{form}`, expected one that agrees with its tensors and parameters"
    )]
    Form { layer: String, kind: &'static str, form: String },
    /// A kernel does not support these sizes.
    #[error("layer `{layer}` ({kind}) does not fit a kernel: {source}")]
    Kernel { layer: String, kind: &'static str, source: switchyard_cuda::Error },
    /// No kernel can update these parameters.
    #[error("the update of the parameters does not fit a kernel: {0}")]
    Update(switchyard_cuda::Error),
    /// Kernels use 32-bit counts.
    #[error("the network has {parameters} numbers in its parameters, expected fewer than 2^32 on GPUs")]
    Parameters { parameters: usize },
    /// The network is invalid on every device.
    #[error(transparent)]
    Model(#[from] ModelError),
}

/// A refusal whose layer is not yet known.
pub(super) enum Reason {
    Missing(String),
    Kernel(switchyard_cuda::Error),
}

impl From<switchyard_cuda::Error> for Reason {
    fn from(error: switchyard_cuda::Error) -> Reason {
        Reason::Kernel(error)
    }
}

impl Reason {
    pub fn of(self, layer: &str, kind: &'static str) -> Refused {
        let layer = layer.to_owned();
        match self {
            Reason::Missing(what) => Refused::Missing { layer, kind, what },
            Reason::Kernel(source) => Refused::Kernel { layer, kind, source },
        }
    }
}
