package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func reportOf(t *testing.T, in string) (out string, ok bool) {
	var text strings.Builder
	r := report{out: &text}
	require.NoError(t, r.read(strings.NewReader(in)))
	ok = r.end()
	return text.String(), ok
}

// run is the report of a test file that really runs.
func run(t *testing.T, source string) (out string, ok bool) {
	file := filepath.Join(t.TempDir(), "a_test.go")
	require.NoError(t, os.WriteFile(file, []byte("package a\n\nimport \"testing\"\n"+source), 0o600))
	text, _ := exec.Command("go", "test", "-json", "-count=1", file).Output() // it fails where its tests do
	return reportOf(t, string(text))
}

func TestReport_AllPassed(t *testing.T) {
	t.Parallel()
	out, ok := run(t, `
		func TestA(t *testing.T) { t.Run("sub", func(t *testing.T) {}) }
		func TestB(t *testing.T) { t.Skip("no tool") }`)
	require.True(t, ok)
	require.Contains(t, out, "no tool")
	require.True(t, strings.HasSuffix(out, "\n2 passed, 0 failed, 1 skipped\n"), out)
}

func TestReport_NoTestIsAFailure(t *testing.T) {
	t.Parallel()
	for _, in := range []string{"", "FAIL: no such package\n"} {
		_, ok := reportOf(t, in)
		require.False(t, ok)
	}
}

func TestReport_OfAFailureSaysHowToRunItAlone(t *testing.T) {
	t.Parallel()
	out, ok := run(t, `
		func TestA(t *testing.T) { t.Run("a sub", func(t *testing.T) { t.Fatal("RATELIMIT_TEST_SEED=17: wrong") }) }
		func TestB(t *testing.T) { t.Log("of no interest") }`)
	require.False(t, ok)
	require.Contains(t, out, "=== FAIL command-line-arguments TestA/a_sub\n")
	require.Equal(t, 1, strings.Count(out, "=== FAIL"), "%s", out)
	require.Contains(t, out, "alone: RATELIMIT_TEST_SEED=17 go test ./command-line-arguments -count=1 -run '^TestA$/^a_sub$'\n")
	require.NotContains(t, out, "of no interest")
}

func TestReport_APanicIsOneFailure(t *testing.T) {
	t.Parallel()
	var waiting strings.Builder
	for i := range 20 {
		fmt.Fprintf(&waiting, "func TestWaiting%d(t *testing.T) { t.Parallel() }\n", i)
	}
	for name, cause := range map[string]string{"of the test": `panic("gone")`, "of a goroutine": `go panic("gone"); select {}`} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			out, ok := run(t, waiting.String()+`func TestZ(t *testing.T) { `+cause+` }`)
			require.False(t, ok)
			require.Equal(t, 1, strings.Count(out, "=== FAIL"), "%s", out)
			require.Contains(t, out, "=== FAIL command-line-arguments TestZ\n")
			require.Contains(t, out, "20 more tests had not ended when their package did.")
		})
	}
}

func TestReport_AProcessThatEndedFailsItsPackage(t *testing.T) {
	t.Parallel()
	out, ok := run(t, `
		import "os"
		func TestA(t *testing.T) { os.Exit(3) }`)
	require.False(t, ok)
	require.Equal(t, 1, strings.Count(out, "=== FAIL"), "%s", out)
	require.Contains(t, out, "  was running: TestA\n")
	require.True(t, strings.HasSuffix(out, "\n0 passed, 1 failed, 0 skipped\n"), out)
}

func TestReport_WhatDoesNotCompileFails(t *testing.T) {
	t.Parallel()
	out, ok := run(t, `func TestA(t *testing.T) { 1 }`)
	require.False(t, ok)
	require.Contains(t, out, "1 (")
}
