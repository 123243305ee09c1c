//go:build tools

// Package tools builds nothing: only files of the required module are taken.
package tools
