/// Why a network cannot be built.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ModelError {
    /// A size that must be positive is 0.
    #[error("{0} is 0, expected at least 1")]
    Zero(&'static str),
    /// Heads do not divide the width.
    #[error("hidden size {hidden} is not a multiple of {heads} heads")]
    Heads { hidden: usize, heads: usize },
    /// The data are of the wrong kind.
    #[error("got {got} from the data, expected {expected}")]
    Data {
        /// What the model takes.
        expected: &'static str,
        got: String,
    },
    /// The number of means or deviations does not match the channels.
    #[error("got {got} means or deviations for images of {channels} channels, expected 1 or {channels}")]
    Channels {
        got: usize,
        /// Channels of the images.
        channels: u32,
    },
    /// A tensor does not fit a layer.
    #[error("layer {layer}: got a tensor of shape {got:?}, expected {expected}")]
    Shape { layer: String, got: Vec<usize>, expected: String },
    /// The output of a layer has no numbers.
    #[error("layer {layer}: its output is empty, expected sizes of at least 1")]
    Empty { layer: String },
    /// A layer has too many inputs.
    #[error("layer {layer}: got {got} inputs, expected at most {}", super::INPUTS)]
    Inputs { layer: String, got: usize },
    /// No loss depends on the output of a layer.
    #[error("layer {layer}: its output leads to no loss")]
    Loose { layer: String },
    /// A layer that works in the memory of its input shares that input with others.
    #[error("layer {layer}: its input is read by other layers too, expected it to be the only one")]
    Shared { layer: String },
    /// The layer behind this one leaves its gradient where this one's output was, which this one still needs.
    #[error(
        "layer {layer}: its backward pass reads its output, and the layer behind it writes the gradient over that; expected another layer between them"
    )]
    Overwritten { layer: String },
    /// A parameter that no layer uses.
    #[error("parameter {parameter} is not used by any layer")]
    Unused { parameter: String },
    /// Two parameters have the same name.
    #[error("two parameters have the name {parameter}")]
    Twice { parameter: String },
    /// A custom model that this program does not have.
    #[error("custom.name: got `{got}`; this worker has {has}")]
    Unknown {
        got: String,
        /// The names that are known.
        has: String,
    },
    /// A parameter of a custom model has a value that cannot be used.
    #[error("custom.parameters.{name}: got `{got}`, expected {expected}")]
    Parameter { name: String, got: String, expected: String },
    /// The plan's size overflows.
    #[error("the model does not fit into an address space")]
    TooLarge,
    /// The machine does not have enough memory; the number is in MiB.
    #[error(
        "not placeable: cannot get {0} MiB for the activations; smallest change that fits: a smaller model or batchSizePerProcess"
    )]
    Memory(usize),
}
