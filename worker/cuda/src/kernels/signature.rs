//! Parses kernel parameters from their source.

use super::{Program, SOURCES, Source};

/// Element format of a kernel's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    F32,
    F64,
    Bf16,
    F16,
    /// Integers, FP8 values or structs, which must match exactly.
    Bits,
}

/// A parameter of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Parameter {
    Memory { format: Format, is_const: bool },
    Int,
    Float,
}

/// Known memory types other than floats. Any other type is unknown.
const BITS: [&str; 9] = ["unsigned", "uint2", "uint4", "Places", "Chunk", "Rules", "Scaler", "Scaling", "Numbers"];

/// The source with this name.
pub(super) fn source(name: &str) -> Option<&'static Source> {
    SOURCES.iter().copied().find(|source| source.name == name)
}

impl Program {
    /// The kernel with this name and its parameters; `None` if the source has no such kernel, or a
    /// parameter has an unknown type.
    pub(super) fn signature(&self, kernel: &str) -> Option<(&'static str, Vec<Parameter>)> {
        let (name, parameters) = kernels(self.source).find(|(name, _)| *name == kernel)?;
        let parameters = parameters.split(',').map(|parameter| self.parameter(parameter));
        Some((name, parameters.collect::<Option<_>>()?))
    }

    /// Parses one parameter, for example `const ELEMENT* x`.
    fn parameter(&self, text: &str) -> Option<Parameter> {
        let text = text.trim();
        let (is_const, rest) = text.strip_prefix("const ").map_or((false, text), |rest| (true, rest));
        match rest.split_once('*') {
            Some((name, _)) => Some(Parameter::Memory { format: self.format(name.trim())?, is_const }),
            None if rest.starts_with("unsigned ") => Some(Parameter::Int),
            None if rest.starts_with("float ") => Some(Parameter::Float),
            None => None,
        }
    }

    /// The format of a type, which can be one that the program defines.
    fn format(&self, name: &str) -> Option<Format> {
        let defined = |definition: &String| {
            definition.strip_prefix("-D")?.strip_prefix(name)?.strip_prefix('=').map(str::to_owned)
        };
        let name = self.definitions.iter().find_map(defined).unwrap_or_else(|| name.to_owned());
        match name.as_str() {
            "float" | "float2" => Some(Format::F32),
            "double" | "double2" => Some(Format::F64),
            "bf16" => Some(Format::Bf16),
            "f16" => Some(Format::F16),
            name => BITS.contains(&name).then_some(Format::Bits),
        }
    }
}

/// Name and parameters of every kernel in a source.
fn kernels(source: &'static Source) -> impl Iterator<Item = (&'static str, &'static str)> {
    source.text.split("__global__ void").skip(1).filter_map(|after| {
        let after = after.trim_start();
        let after = match after.strip_prefix("__launch_bounds__(") {
            Some(rest) => rest.split_once(')')?.1,
            None => after,
        };
        let (name, rest) = after.split_once('(')?;
        Some((name.trim(), rest.split_once(')')?.0))
    })
}

#[cfg(test)]
mod tests {
    use super::super::layer_norm::LayerNorm;
    use super::super::{Element, Rows};
    use super::*;

    #[test]
    fn every_kernel_of_every_source_has_parameters_of_known_types() {
        let definitions = ["ELEMENT", "FROM", "TO", "COPY"].map(|name| format!("-D{name}=bf16"));
        for source in SOURCES {
            let program = Program { source, definitions: definitions.to_vec() };
            let names: Vec<&str> = kernels(source).map(|(name, _)| name).collect();
            assert_eq!(names.len(), source.text.matches("__global__").count(), "{}: {names:?}", source.name);
            assert!(!names.is_empty(), "{}", source.name);
            for name in names {
                assert!(program.signature(name).is_some(), "{}: {name}", source.name);
            }
        }
    }

    #[test]
    fn a_signature_has_the_types_that_the_program_defines() {
        let rows = Rows { element: Element::F16, width: 8, pitch: 8 };
        let program = LayerNorm::new(rows, 1).unwrap().program();
        let memory = |format, is_const| Parameter::Memory { format, is_const };
        let (name, parameters) = program.signature("layer_norm_parameters").unwrap();
        assert_eq!(name, "layer_norm_parameters");
        let floats = memory(Format::F32, false);
        assert_eq!(parameters, [memory(Format::F32, true), floats, floats, Parameter::Int, Parameter::Int]);
        let (_, parameters) = program.signature("layer_norm_forward").unwrap();
        assert_eq!((parameters[0], parameters[3]), (memory(Format::F16, true), memory(Format::F16, false)));
        assert_eq!(program.signature("layer_norm"), None);
    }
}
