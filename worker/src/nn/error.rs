/// Why a network cannot be built.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ModelError {
    /// A size is 0.
    #[error("{0} is 0, expected at least 1")]
    Zero(&'static str),
    /// The number of heads does not divide the width.
    #[error("hidden size {hidden} is not a multiple of {heads} heads")]
    Heads { hidden: usize, heads: usize },
    /// The data are of the wrong kind.
    #[error("got {got} from the data, expected {expected}")]
    Data {
        /// What the model accepts.
        expected: &'static str,
        got: String,
    },
    /// The number of means or deviations does not match the channels.
    #[error("got {got} means or deviations for images of {channels} channels, expected 1 or {channels}")]
    Channels {
        got: usize,
        /// Image channels.
        channels: u32,
    },
    /// A tensor's shape does not suit a layer.
    #[error("layer {layer}: got a tensor of shape {got:?}, expected {expected}")]
    Shape { layer: String, got: Vec<usize>, expected: String },
    /// A layer's output has no elements.
    #[error("layer {layer}: its output is empty, expected sizes of at least 1")]
    Empty { layer: String },
    /// A layer has too many inputs.
    #[error("layer {layer}: got {got} inputs, expected at most {}", super::INPUTS)]
    Inputs { layer: String, got: usize },
    /// No loss depends on the output of a layer.
    #[error("layer {layer}: no loss depends on its output")]
    UnusedOutput { layer: String },
    /// A layer that reuses the memory of its input shares that input with others.
    #[error("layer {layer}: its input is also read by other layers, expected it to be the only reader")]
    Shared { layer: String },
    /// The next layer writes its gradient over this layer's output, which this layer still needs.
    #[error(
        "layer {layer}: its backward pass reads its output, but the next layer overwrites that with its gradient; expected another layer in between"
    )]
    Overwritten { layer: String },
    /// No layer uses a parameter.
    #[error("parameter {parameter} is not used by any layer")]
    UnusedParameter { parameter: String },
    /// Two parameters have the same name.
    #[error("two parameters are named {parameter}")]
    DuplicateParameter { parameter: String },
    /// Blocks shall be recomputed, but the model has none.
    #[error("recomputation: got Blocks; expected None: the model marks no blocks")]
    NoBlocks,
    /// This program does not have the custom model.
    #[error("custom.name: got `{got}`; this worker has {has}")]
    Unknown {
        got: String,
        /// The known names.
        has: String,
    },
    /// A custom model's parameter has an invalid value.
    #[error("custom.parameters.{name}: got `{got}`, expected {expected}")]
    Parameter { name: String, got: String, expected: String },
    /// The plan's size overflows `usize`.
    #[error("the model exceeds the address space")]
    TooLarge,
    /// The machine does not have enough memory; the size is in MiB.
    #[error(
        "not placeable: cannot get {0} MiB for the activations; smallest change that fits: a smaller model or batchSizePerProcess"
    )]
    Memory(usize),
}
