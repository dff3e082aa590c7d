package client_test

import (
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
)

var (
	_ client.Acquirer = (*client.Limiter)(nil)
	_ client.Acquirer = (*client.Combiner)(nil)
)

// An option that a method cannot use does not compile, nor does a way past the Combiner.
func TestOptions_AreForTheirMethods(t *testing.T) {
	t.Parallel()
	compile := compiler(t)
	for _, fits := range []string{
		`limiter.Acquire(ctx, "p", "k", client.Cost(1), client.IdempotencyKey("x"))`,
		`combiner.Acquire(ctx, "p", "k", client.Cost(1), client.IdempotencyKey("x"))`,
		`limiter.Peek(ctx, "p", "k", client.Cost(1))`,
		`limiter.AcquireAll(ctx, []client.Charge{{Policy: "p", Key: "k"}, {Policy: "p", Key: "l", Cost: client.Cost(2)}}, client.IdempotencyKey("x"))`,
		`combiner.AcquireAll(ctx, nil, client.IdempotencyKey("x"))`,
		`combiner.WithTx(nil).AcquireAll(ctx, nil)`,
		`limiter.Overrides(ctx, client.OfPolicy("p"), client.OfKey("k"), client.MaxRows(1))`,
		`limiter.Acquire(ctx, "p", "k", []client.AcquireOption{client.Cost(1)}...)`,
		`limiter.Peek(ctx, "p", "k", []client.PeekOption{client.Cost(1)}...)`,
		`limiter.Cleanup(ctx, client.MaxRows(1))`,
		`limiter.RunCleanup(ctx, 1, client.OnError(nil))`,
		`client.New(nil, client.Schema(""), client.NoFlush(), client.DenialCache())`,
		`client.NewCombiner(nil, client.Schema(""), client.NoFlush(), client.DenialCache(), client.CallsInFlight(1))`,
		`client.NewCombiner(nil, []client.CombinerOption{client.LimiterOption(nil)}...)`,
		`combiner.WithTx(nil).Acquire(ctx, "p", "k")`,
	} {
		require.NoError(t, compile(fits), fits)
	}
	for unfit, complaint := range map[string]string{
		`limiter.Peek(ctx, "p", "k", client.IdempotencyKey("x"))`:  "does not implement client.PeekOption",
		`combiner.Peek(ctx, "p", "k", client.IdempotencyKey("x"))`: "does not implement client.PeekOption",
		`limiter.Acquire(ctx, "p", "k", client.MaxRows(1))`:        "does not implement client.AcquireOption",
		`limiter.AcquireAll(ctx, nil, client.Cost(1))`:             "does not implement client.AcquireAllOption",
		`limiter.Overrides(ctx, client.OnError(nil))`:              "does not implement client.OverridesOption",
		`limiter.Cleanup(ctx, client.OfKey("k"))`:                  "does not implement client.CleanupOption",
		`limiter.Cleanup(ctx, client.OnError(nil))`:                "does not implement client.CleanupOption",
		`limiter.RunCleanup(ctx, 1, client.MaxRows(1))`:            "does not implement client.RunCleanupOption",
		`client.New(nil, client.CallsInFlight(1))`:                 "does not implement client.LimiterOption",
		`client.New(nil, client.Cost(1))`:                          "does not implement client.LimiterOption",
		`combiner.Limiter.Acquire(ctx, "p", "k")`:                  "combiner.Limiter undefined",
		`combiner.WithTx(nil).Close()`:                             "Close undefined",
	} {
		require.ErrorContains(t, compile(unfit), complaint, unfit)
	}
}

// compiler type-checks a statement of a program that imports the client, as go build does.
func compiler(t *testing.T) func(statement string) error {
	t.Helper()
	list := exec.CommandContext(t.Context(), "go", "list", "-export", "-deps", "-f", "{{with .Export}}{{$.ImportPath}} {{.}}{{end}}", ".")
	out, err := list.Output()
	require.NoError(t, err)
	exports := map[string]string{}
	for line := range strings.Lines(string(out)) {
		if path, file, ok := strings.Cut(strings.TrimSpace(line), " "); ok {
			exports[path] = file
		}
	}
	files := token.NewFileSet()
	config := types.Config{Importer: importer.ForCompiler(files, "gc", func(path string) (io.ReadCloser, error) {
		return os.Open(filepath.Clean(exports[path]))
	})}
	return func(statement string) error {
		file, err := parser.ParseFile(files, "", `package program
			import ("context"; "github.com/pgratelimit/pgratelimit/client")
			func run(ctx context.Context, limiter *client.Limiter, combiner *client.Combiner) { `+statement+` }`, 0)
		require.NoError(t, err)
		_, err = config.Check("program", files, []*ast.File{file}, nil)
		return err
	}
}

func TestOptions_OfAnotherPackageAreNotIgnored(t *testing.T) {
	t.Parallel()
	limiter := client.New(&fakeDB{answers: []any{granted(1)}})
	hidden := struct{ client.AcquireOption }{client.IdempotencyKey("x")}
	require.Panics(t, func() { _, _ = limiter.Acquire(t.Context(), "p", "k", hidden) })
	require.Panics(t, func() { _, _ = limiter.Acquire(t.Context(), "p", "k", nil) })
}

func TestCost_IsOneUnlessSaid(t *testing.T) {
	t.Parallel()
	require.EqualValues(t, 1, client.CostOption{}.Tokens())
	for _, n := range []int64{math.MinInt64, -1, 0, 1, 2, math.MaxInt64} {
		require.Equal(t, n, client.Cost(n).Tokens())
	}
}
