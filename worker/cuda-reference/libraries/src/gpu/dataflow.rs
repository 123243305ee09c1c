//! Graphs of tensor operations, executed one after another by definition in f32.

use crate::gpu::Gpu;
use crate::gpu::access::Access;
use crate::gpu::tensor::{Place, Tensor};
use crate::shadow::Stamp;
use std::collections::BTreeMap;
use std::ops::Range;
use switchyard_cuda_reference::Touched;

/// The kind of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OperationKind {
    /// Matrix product over the last two axes.
    Product,
    /// `cudnnPointwiseMode_t`, and the axis of indices.
    Pointwise(i64, u64),
    /// Maximum or sum along an axis.
    Reduction { max: bool },
    /// The same elements with other axes.
    Reshape,
}

const ADD: i64 = 0;
const MULTIPLY: i64 = 1;
const DIVIDE: i64 = 6;
const SUBTRACT: i64 = 9;
const EXPONENTIAL: i64 = 13;
const LOGARITHM: i64 = 15;
const IDENTITY: i64 = 21;
const GREATER_OR_EQUAL: i64 = 303;
const INDEX: i64 = 501;
const SELECT: i64 = 601;

/// Each mode with its number of tensors.
pub(crate) const MODES: [(i64, usize); 10] = [
    (ADD, 2),
    (MULTIPLY, 2),
    (DIVIDE, 2),
    (SUBTRACT, 2),
    (EXPONENTIAL, 1),
    (LOGARITHM, 1),
    (IDENTITY, 1),
    (GREATER_OR_EQUAL, 2),
    (INDEX, 1),
    (SELECT, 3),
];

/// An operation and its tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) kind: OperationKind,
    pub(crate) inputs: Vec<Tensor>,
    pub(crate) output: Tensor,
}

/// Operations in topological order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Dataflow(Vec<Node>);

/// A graph bound to memory.
#[derive(Debug, Clone)]
pub(crate) struct Bound {
    pub(crate) flow: Dataflow,
    /// Addresses of tensors on the device.
    pub(crate) addresses: Vec<(i64, u64)>,
    /// Values of scalars in host memory.
    pub(crate) numbers: Vec<(i64, f32)>,
    pub(crate) workspace: Range<u64>,
}

impl Node {
    /// Whether the axes fit.
    pub(crate) fn fits(&self) -> bool {
        let y = self.output.dimensions;
        let spreads = |tensor: &Tensor| tensor.dimensions.iter().zip(y).all(|(one, all)| *one == 1 || *one == all);
        match (self.kind, &self.inputs[..]) {
            (OperationKind::Product, [a, b]) => {
                let ([c, d, rows, inner], [e, f, other, columns]) = (a.dimensions, b.dimensions);
                [c, d, inner] == [e, f, other] && [c, d, rows, columns] == y
            }
            (OperationKind::Pointwise(mode, axis), inputs) => {
                MODES.contains(&(mode, inputs.len())) && axis < 4 && inputs.iter().all(spreads)
            }
            (OperationKind::Reduction { .. }, [x]) => {
                x.dimensions.iter().zip(y).all(|(all, one)| one == 1 || one == *all)
            }
            (OperationKind::Reshape, [x]) => x.len() == self.output.len(),
            _ => false,
        }
    }

    /// Computes the node from its input tensors, in axis order.
    fn computed(&self, inputs: &[&[f32]]) -> Vec<f32> {
        let y = self.output.dimensions.map(|length| length as usize);
        match (self.kind, inputs) {
            (OperationKind::Product, [a, b]) => {
                let (rows, columns, inner) = (y[2], y[3], self.inputs[0].dimensions[3] as usize);
                let mut sums = vec![0.0f32; self.output.len()];
                for (matrix, sums) in sums.chunks_mut((rows * columns).max(1)).enumerate() {
                    for (row, sums) in sums.chunks_mut(columns).enumerate() {
                        for k in 0..inner {
                            let factor = a[(matrix * rows + row) * inner + k];
                            let b = &b[(matrix * inner + k) * columns..][..columns];
                            sums.iter_mut().zip(b).for_each(|(sum, b)| *sum += factor * b);
                        }
                    }
                }
                sums
            }
            (OperationKind::Reduction { max }, [x]) => {
                let mut all = vec![if max { f32::NEG_INFINITY } else { 0.0 }; self.output.len()];
                for (number, place) in x.iter().zip(broadcast_indices(y, self.inputs[0].dimensions)) {
                    let to = &mut all[place];
                    *to = if max { to.max(*number) } else { *to + number };
                }
                all
            }
            (OperationKind::Reshape, [x]) => reshaped(&self.inputs[0], &self.output, x),
            (OperationKind::Pointwise(mode, axis), inputs) => {
                let places: Vec<Vec<usize>> = self
                    .inputs
                    .iter()
                    .map(|input| {
                        broadcast_indices(input.dimensions.map(|length| length as usize), self.output.dimensions)
                    })
                    .collect();
                let of = |input: usize, at: usize| inputs[input][places[input][at]];
                let after: usize = y[axis as usize + 1..].iter().product();
                let one = |at: usize| match mode {
                    ADD => of(0, at) + of(1, at),
                    MULTIPLY => of(0, at) * of(1, at),
                    DIVIDE => of(0, at) / of(1, at),
                    SUBTRACT => of(0, at) - of(1, at),
                    EXPONENTIAL => of(0, at).exp(),
                    LOGARITHM => of(0, at).ln(),
                    GREATER_OR_EQUAL => f32::from(u8::from(of(0, at) >= of(1, at))),
                    INDEX => (at / after % y[axis as usize]) as f32,
                    SELECT => of(if of(2, at) == 0.0 { 1 } else { 0 }, at),
                    _ => of(0, at),
                };
                (0..self.output.len()).map(one).collect()
            }
            _ => Vec::new(),
        }
    }
}

/// Broadcasting: for each element of a tensor with axes `all`, the index into a tensor whose axes
/// are equally long or 1.
fn broadcast_indices(one: [usize; 4], all: [u64; 4]) -> Vec<usize> {
    let mut places = vec![0];
    for (length, all) in one.into_iter().zip(all) {
        let along = |place: usize| (0..all as usize).map(move |at| place * length + if length == 1 { 0 } else { at });
        places = places.into_iter().flat_map(along).collect();
    }
    places
}

/// The elements of `x` as `y` orders them, if both were contiguous in memory.
fn reshaped(x: &Tensor, y: &Tensor, numbers: &[f32]) -> Vec<f32> {
    let mut to = vec![0.0; numbers.len()];
    for (from, place) in x.places().into_iter().zip(y.places()) {
        to[place] = numbers[from];
    }
    to
}

impl Dataflow {
    /// # Errors
    /// An operation needs a tensor that none before it produces, or two produce the same one.
    pub(crate) fn new(nodes: Vec<Node>) -> Result<Dataflow, String> {
        let mut made: Vec<&Tensor> = Vec::new();
        let mut seen: BTreeMap<i64, &Tensor> = BTreeMap::new();
        for Node { inputs, output, .. } in &nodes {
            for tensor in inputs.iter().chain([output]) {
                if *seen.entry(tensor.id).or_insert(tensor) != tensor {
                    return Err(format!("two tensors have number {}", tensor.id));
                }
            }
            let missing = |tensor: &&Tensor| tensor.place == Place::Between && !made.contains(tensor);
            if let Some(tensor) = inputs.iter().find(missing) {
                return Err(format!("nothing before makes tensor {}", tensor.id));
            }
            if output.place == Place::Host || made.contains(&output) {
                return Err(format!("tensor {} is of the host, or made twice", output.id));
            }
            made.push(output);
        }
        Ok(Dataflow(nodes))
    }

    pub(crate) fn nodes(&self) -> &[Node] {
        &self.0
    }

    /// Distinct tensors of a place: those that are read, and those that are produced.
    pub(crate) fn tensors(&self, place: Place) -> [Vec<&Tensor>; 2] {
        let made: Vec<&Tensor> = self.0.iter().map(|node| &node.output).filter(|made| made.place == place).collect();
        let mut read: Vec<&Tensor> = Vec::new();
        for tensor in self.0.iter().flat_map(|node| &node.inputs).filter(|tensor| tensor.place == place) {
            if !made.contains(&tensor) && !read.contains(&tensor) {
                read.push(tensor);
            }
        }
        [read, made]
    }
}

impl Bound {
    pub(crate) fn name(&self) -> String {
        format!("a graph of {} operations", self.flow.0.len())
    }

    fn address(&self, tensor: &Tensor) -> u64 {
        self.addresses.iter().find(|(id, _)| *id == tensor.id).map_or(0, |(_, address)| *address)
    }

    /// All memory that is read or written.
    pub(crate) fn uses(&self) -> Vec<Range<u64>> {
        let tensors = self.flow.tensors(Place::Device).concat().into_iter();
        let tensors = tensors.map(|tensor| tensor.whole(self.address(tensor)));
        tensors.chain((!self.workspace.is_empty()).then(|| self.workspace.clone())).collect()
    }

    /// `is_wrong`: see [`crate::fault`].
    pub(crate) fn run(&self, gpu: &mut Gpu, stamp: &Stamp, is_wrong: bool) -> Vec<Touched> {
        let [read, made] = self.flow.tensors(Place::Device);
        let ranges = |tensors: &[&Tensor]| -> Vec<Range<u64>> {
            tensors.iter().flat_map(|tensor| tensor.ranges(self.address(tensor))).collect()
        };
        let mut access = Access { reads: ranges(&read), writes: ranges(&made), ..Access::default() };
        access.writes.push(self.workspace.clone());
        let touched = access.touched(gpu, stamp);
        // The previous content of the workspace is lost.
        gpu.write(self.workspace.start, &vec![0xff; (self.workspace.end - self.workspace.start) as usize]);
        let mut known: BTreeMap<i64, Vec<f32>> = self.numbers.iter().map(|(id, number)| (*id, vec![*number])).collect();
        for tensor in read {
            let numbers = tensor.read(gpu, self.address(tensor), stamp);
            known.insert(tensor.id, by_axes(tensor, &numbers));
        }
        let mut is_wrong = is_wrong;
        for node in &self.flow.0 {
            let inputs: Vec<&[f32]> =
                node.inputs.iter().filter_map(|tensor| known.get(&tensor.id)).map(Vec::as_slice).collect();
            let mut numbers = node.output.rounded(node.computed(&inputs));
            if node.output.place == Place::Device {
                if std::mem::take(&mut is_wrong) {
                    numbers[0] += 1.0;
                }
                let in_memory: Vec<f32> = node.output.places().into_iter().map(|place| numbers[place]).collect();
                node.output.write(gpu, self.address(&node.output), &in_memory);
            }
            known.insert(node.output.id, numbers);
        }
        touched
    }
}

/// Reorders elements from memory order to axis order.
fn by_axes(tensor: &Tensor, numbers: &[f32]) -> Vec<f32> {
    let mut all = vec![0.0; numbers.len()];
    for (place, number) in tensor.places().into_iter().zip(numbers) {
        all[place] = *number;
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numbers::Format;

    fn tensor(id: i64, dimensions: [u64; 4], place: Place) -> Tensor {
        let [_, b, c, d] = dimensions;
        Tensor { id, format: Format::F32, alignment: 4, dimensions, strides: [b * c * d, c * d, d, 1], place }
    }

    fn add(inputs: [Tensor; 2], output: Tensor) -> Node {
        Node { kind: OperationKind::Pointwise(ADD, 0), inputs: inputs.into(), output }
    }

    #[test]
    fn operations_use_only_what_exists_and_produce_nothing_twice() {
        let all = [1, 1, 2, 3];
        let [x, y] = [1, 2].map(|id| tensor(id, all, Place::Device));
        let [between, other] = [3, 4].map(|id| tensor(id, all, Place::Between));
        let good = vec![add([x.clone(), x.clone()], between.clone()), add([between.clone(), x.clone()], y.clone())];
        let flow = Dataflow::new(good.clone()).unwrap();
        assert_eq!(flow.tensors(Place::Device), [vec![&x], vec![&y]]);
        let refusal = |nodes| Dataflow::new(nodes).unwrap_err();
        assert_eq!(refusal(vec![add([x.clone(), other], y.clone())]), "nothing before makes tensor 4");
        assert_eq!(refusal([good.clone(), good].concat()), "tensor 3 is of the host, or made twice");
        let namesake = tensor(1, [1, 1, 2, 1], Place::Device);
        assert_eq!(refusal(vec![add([x, namesake], y)]), "two tensors have number 1");
    }

    #[test]
    fn mismatched_axes_are_detected() {
        let of = |id, dimensions| tensor(id, dimensions, Place::Device);
        let x = || of(1, [1, 2, 3, 4]);
        let node = |kind, inputs: &[Tensor], y| Node { kind, inputs: inputs.to_vec(), output: of(9, y) };
        let by = of(2, [1, 2, 4, 5]);
        assert!(node(OperationKind::Product, &[x(), by.clone()], [1, 2, 3, 5]).fits());
        assert!(!node(OperationKind::Product, &[by, x()], [1, 2, 3, 5]).fits());
        assert!(node(OperationKind::Reduction { max: true }, &[x()], [1, 2, 3, 1]).fits());
        assert!(!node(OperationKind::Reduction { max: true }, &[x()], [1, 2, 3, 2]).fits());
        assert!(add([x(), of(2, [1, 1, 1, 1])], of(9, [1, 2, 3, 4])).fits(), "one number for all");
        assert!(!add([x(), of(2, [1, 2, 3, 2])], of(9, [1, 2, 3, 4])).fits());
        assert!(!node(OperationKind::Pointwise(SELECT, 0), &[x(), x()], [1, 2, 3, 4]).fits(), "it takes three");
        assert!(node(OperationKind::Reshape, &[x()], [1, 2, 4, 3]).fits());
        assert!(!node(OperationKind::Reshape, &[x()], [1, 2, 4, 4]).fits());
    }

    #[test]
    fn a_reshape_follows_memory_order() {
        let (x, y) = (tensor(1, [1, 1, 2, 3], Place::Device), tensor(2, [1, 1, 3, 2], Place::Device));
        let turned = Tensor { strides: [6, 6, 1, 3], ..y };
        assert_eq!(reshaped(&x, &turned, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
    }
}
