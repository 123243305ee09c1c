//! Why a network cannot be built.

/// Why a model cannot be built.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ModelError {
    /// A size that must be positive is 0.
    #[error("{0} is 0, expected at least 1")]
    Zero(&'static str),
    /// Heads do not divide the width.
    #[error("hidden size {hidden} is not a multiple of {heads} heads")]
    Heads {
        /// Width of the residual stream.
        hidden: usize,
        /// Heads asked for.
        heads: usize,
    },
    /// The data are of another kind.
    #[error("got {got} from the data, expected {expected}")]
    Data {
        /// What the model takes.
        expected: &'static str,
        /// What there is.
        got: String,
    },
    /// Means or deviations for another number of channels.
    #[error("got {got} means or deviations for images of {channels} channels, expected 1 or {channels}")]
    Channels {
        /// Numbers given.
        got: usize,
        /// Channels of the images.
        channels: u32,
    },
    /// A tensor does not fit a layer.
    #[error("layer {layer}: got a tensor of shape {got:?}, expected {expected}")]
    Shape {
        /// The layer.
        layer: String,
        /// Shape of the tensor.
        got: Vec<usize>,
        /// What it takes.
        expected: String,
    },
    /// A layer makes a tensor without numbers.
    #[error("layer {layer}: its output is empty, expected sizes of at least 1")]
    Empty {
        /// The layer.
        layer: String,
    },
    /// A layer has too many inputs.
    #[error("layer {layer}: got {got} inputs, expected at most {}", super::INPUTS)]
    Inputs {
        /// The layer.
        layer: String,
        /// Inputs.
        got: usize,
    },
    /// Nobody reads what a layer computes.
    #[error("layer {layer}: its output leads to no loss")]
    Loose {
        /// The layer.
        layer: String,
    },
    /// A layer that uses its input's memory shares the input with others.
    #[error("layer {layer}: its input is read by other layers too, expected it to be the only one")]
    Shared {
        /// The layer.
        layer: String,
    },
    /// A parameter that no layer uses.
    #[error("parameter {parameter} is not used by any layer")]
    Unused {
        /// The parameter.
        parameter: String,
    },
    /// Two parameters of one name.
    #[error("two parameters have the name {parameter}")]
    Twice {
        /// The name.
        parameter: String,
    },
    /// A custom model that this program does not have.
    #[error("custom.name: got `{got}`; this worker has {has}")]
    Unknown {
        /// The name asked for.
        got: String,
        /// The names there are.
        has: String,
    },
    /// A parameter of a custom model that it cannot use.
    #[error("custom.parameters.{name}: got `{got}`, expected {expected}")]
    Parameter {
        /// Its name.
        name: String,
        /// Its value.
        got: String,
        /// What it should be.
        expected: String,
    },
    /// The plan's size overflows.
    #[error("the model does not fit into an address space")]
    TooLarge,
    /// The machine does not have the memory.
    #[error(
        "not placeable: cannot get {0} MiB for the activations; smallest change that fits: a smaller model or batchSizePerProcess"
    )]
    Memory(usize),
}
