//! cuDNN operation graphs: tensor and operation descriptors, joined into a graph that cuDNN plans
//! as a whole.

use crate::cudnn::{
    Cudnn, FLOAT, OPERATIONGRAPH_DESCRIPTOR, OPERATIONGRAPH_HANDLE, OPERATIONGRAPH_OPS, TensorLayout, Value,
};
use crate::error::Error;
use crate::library::{Handle, Pointer};

const POINTWISE_DESCRIPTOR: i32 = 0;
const OPERATION_POINTWISE_DESCRIPTOR: i32 = 13;
const MATMUL_DESCRIPTOR: i32 = 18;
const OPERATION_MATMUL_DESCRIPTOR: i32 = 19;
const REDUCTION_DESCRIPTOR: i32 = 21;
const OPERATION_REDUCTION_DESCRIPTOR: i32 = 22;
const OPERATION_RESHAPE_DESCRIPTOR: i32 = 31;

const POINTWISE_MODE: i32 = 0;
const POINTWISE_MATH_PREC: i32 = 1;
const POINTWISE_AXIS: i32 = 9;
const OPERATION_POINTWISE_PW_DESCRIPTOR: i32 = 750;
const OPERATION_POINTWISE_XDESC: i32 = 751;
const OPERATION_POINTWISE_BDESC: i32 = 752;
const OPERATION_POINTWISE_YDESC: i32 = 753;
const OPERATION_POINTWISE_TDESC: i32 = 758;
const MATMUL_COMP_TYPE: i32 = 1500;
const OPERATION_MATMUL_ADESC: i32 = 1520;
const OPERATION_MATMUL_BDESC: i32 = 1521;
const OPERATION_MATMUL_CDESC: i32 = 1522;
const OPERATION_MATMUL_DESC: i32 = 1523;
const REDUCTION_OPERATOR: i32 = 1600;
const REDUCTION_COMP_TYPE: i32 = 1601;
const OPERATION_REDUCTION_XDESC: i32 = 1610;
const OPERATION_REDUCTION_YDESC: i32 = 1611;
const OPERATION_REDUCTION_DESC: i32 = 1612;
const OPERATION_RESHAPE_XDESC: i32 = 2200;
const OPERATION_RESHAPE_YDESC: i32 = 2201;

/// Elementwise operations, computed in f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Pointwise {
    Add = 0,
    Multiply = 1,
    Divide = 6,
    Subtract = 9,
    Exponential = 13,
    Logarithm = 15,
    GreaterOrEqual = 303,
    /// The index of an element along an axis.
    Index = 501,
    /// The first operand where the third is true, otherwise the second.
    Select = 601,
}

/// Reduction operators along an axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Reduction {
    Add = 0,
    Max = 3,
}

/// A graph, and the descriptors that must outlive it.
pub(crate) struct Graph {
    pub(crate) descriptor: Handle,
    _parts: Vec<Handle>,
}

/// Collects operations.
pub(crate) struct Builder<'a> {
    cudnn: &'a Cudnn,
    parts: Vec<Handle>,
    operations: Vec<Pointer>,
}

impl<'a> Builder<'a> {
    pub(crate) fn new(cudnn: &'a Cudnn) -> Builder<'a> {
        Builder { cudnn, parts: Vec::new(), operations: Vec::new() }
    }

    pub(crate) fn tensor(&mut self, tensor: &TensorLayout) -> Result<Pointer, Error> {
        let descriptor = self.cudnn.tensor(tensor)?;
        Ok(self.keep(descriptor))
    }

    /// Creates a finalized descriptor with these attributes.
    pub(crate) fn part(&mut self, kind: i32, name: &str, attributes: &[(i32, Value<'_>)]) -> Result<Pointer, Error> {
        let descriptor = self.cudnn.descriptor(kind)?;
        for (attribute, value) in attributes {
            self.cudnn.set(&descriptor, *attribute, value)?;
        }
        self.cudnn.finalize(&descriptor, name)?;
        Ok(self.keep(descriptor))
    }

    /// Adds an operation to the graph. Operations are added in dependency order.
    pub(crate) fn operation(&mut self, kind: i32, name: &str, attributes: &[(i32, Value<'_>)]) -> Result<(), Error> {
        let operation = self.part(kind, name, attributes)?;
        self.operations.push(operation);
        Ok(())
    }

    /// `y = a b`, accumulated in f32.
    pub(crate) fn multiply(&mut self, a: Pointer, b: Pointer, y: Pointer) -> Result<(), Error> {
        let how = self.part(MATMUL_DESCRIPTOR, "product", &[(MATMUL_COMP_TYPE, Value::DataType(FLOAT))])?;
        let attributes = [
            (OPERATION_MATMUL_ADESC, Value::Descriptors(&[a])),
            (OPERATION_MATMUL_BDESC, Value::Descriptors(&[b])),
            (OPERATION_MATMUL_CDESC, Value::Descriptors(&[y])),
            (OPERATION_MATMUL_DESC, Value::Descriptors(&[how])),
        ];
        self.operation(OPERATION_MATMUL_DESCRIPTOR, "operation of a product", &attributes)
    }

    /// `y` from one to three tensors, elementwise; axes of length one are broadcast.
    pub(crate) fn pointwise(&mut self, mode: Pointwise, of: &[Pointer], y: Pointer) -> Result<(), Error> {
        self.pointwise_along(mode, None, of, y)
    }

    /// `y`: the index of each element of `x` along an axis.
    pub(crate) fn index(&mut self, axis: i64, x: Pointer, y: Pointer) -> Result<(), Error> {
        self.pointwise_along(Pointwise::Index, Some(axis), &[x], y)
    }

    fn pointwise_along(&mut self, mode: Pointwise, axis: Option<i64>, of: &[Pointer], y: Pointer) -> Result<(), Error> {
        let axis = axis.map(|axis| [axis]);
        let mut how =
            vec![(POINTWISE_MODE, Value::Pointwise(mode as i32)), (POINTWISE_MATH_PREC, Value::DataType(FLOAT))];
        how.extend(axis.as_ref().map(|axis| (POINTWISE_AXIS, Value::Integers(axis))));
        let how = [self.part(POINTWISE_DESCRIPTOR, "pointwise", &how)?];
        let y = [y];
        let mut attributes = vec![(OPERATION_POINTWISE_PW_DESCRIPTOR, Value::Descriptors(&how))];
        let names = [OPERATION_POINTWISE_XDESC, OPERATION_POINTWISE_BDESC, OPERATION_POINTWISE_TDESC];
        attributes.extend(names.into_iter().zip(of.chunks(1)).map(|(name, one)| (name, Value::Descriptors(one))));
        attributes.push((OPERATION_POINTWISE_YDESC, Value::Descriptors(&y)));
        self.operation(OPERATION_POINTWISE_DESCRIPTOR, &format!("operation {mode:?}"), &attributes)
    }

    /// `y`: `x` reduced along the axes where `y` has length one.
    pub(crate) fn reduce(&mut self, by: Reduction, x: Pointer, y: Pointer) -> Result<(), Error> {
        let how = [(REDUCTION_OPERATOR, Value::Reduction(by as i32)), (REDUCTION_COMP_TYPE, Value::DataType(FLOAT))];
        let how = self.part(REDUCTION_DESCRIPTOR, "reduction", &how)?;
        let attributes = [
            (OPERATION_REDUCTION_XDESC, Value::Descriptors(&[x])),
            (OPERATION_REDUCTION_YDESC, Value::Descriptors(&[y])),
            (OPERATION_REDUCTION_DESC, Value::Descriptors(&[how])),
        ];
        self.operation(OPERATION_REDUCTION_DESCRIPTOR, &format!("operation of a reduction ({by:?})"), &attributes)
    }

    /// `y`: the elements of `x` with the dimensions and strides of `y`.
    pub(crate) fn reshape(&mut self, x: Pointer, y: Pointer) -> Result<(), Error> {
        let attributes =
            [(OPERATION_RESHAPE_XDESC, Value::Descriptors(&[x])), (OPERATION_RESHAPE_YDESC, Value::Descriptors(&[y]))];
        self.operation(OPERATION_RESHAPE_DESCRIPTOR, "operation of a reshape", &attributes)
    }

    pub(crate) fn graph(self) -> Result<Graph, Error> {
        let descriptor = self.cudnn.descriptor(OPERATIONGRAPH_DESCRIPTOR)?;
        self.cudnn.set(&descriptor, OPERATIONGRAPH_OPS, &Value::Descriptors(&self.operations))?;
        // Without a handle, the graph is for a described device.
        if let Ok(raw) = self.cudnn.raw() {
            self.cudnn.set(&descriptor, OPERATIONGRAPH_HANDLE, &Value::Library(raw))?;
        }
        self.cudnn.finalize(&descriptor, "operation graph")?;
        Ok(Graph { descriptor, _parts: self.parts })
    }

    fn keep(&mut self, descriptor: Handle) -> Pointer {
        let raw = descriptor.raw;
        self.parts.push(descriptor);
        raw
    }
}

#[cfg(test)]
mod tests;
