package main

import (
	"context"
	"flag"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// No figure of the page is written by hand: make bench-page writes them.
func TestPage_HasTheFiguresOfTheResults(t *testing.T) {
	t.Parallel()
	all, err := readResults("results")
	require.NoError(t, err)
	page, err := os.ReadFile("../../docs/performance.md")
	require.NoError(t, err)
	next, err := renewPage(string(page), all)
	require.NoError(t, err)
	require.Equal(t, next, string(page), "make bench-page")
	for name := range pageBlocks {
		require.Contains(t, string(page), "<!-- bench:"+name+" -->")
	}
	for _, wrong := range []string{"<!-- bench:unknown -->\n<!-- end -->\n", "<!-- bench:summary -->\n", "<!-- bench:Summary -->\n<!-- end -->\n"} {
		_, err := renewPage(wrong, nil)
		require.Error(t, err, wrong)
	}
}

// A row of the page whose measure is misspelt would never have a figure.
func TestPage_ShowsMeasuresThatThereAre(t *testing.T) {
	t.Parallel()
	r := report{Machine: map[string]string{"machine": "2 cores of a processor, 24 GB"}, Ratios: map[string]span{}, Cells: map[string]sample{}}
	cells, chosen, err := choose("*")
	require.NoError(t, err)
	for _, cell := range cells {
		r.Cells[cell] = sample{rate: 12345, p99: 12345, cpuServer: 12345, cpuClient: 12345, "bytes": 12345, "to_formula": 12345}
	}
	require.Len(t, chosen, len(ratios), "each ratio is of cells that there are")
	for _, c := range chosen {
		r.Ratios[c.name] = span{1, 2, 3}
	}
	for name, write := range pageBlocks {
		block := write(processor{&r, "bench"})
		for line := range strings.Lines(block) {
			if strings.HasPrefix(line, "|") {
				require.Less(t, strings.Count(line, "| – "), strings.Count(line, "|")-2, "no figure in %s", line)
			}
		}
		if name != "summary" && name != "distance" {
			require.NotContains(t, block, "–", name)
		}
	}
}

// A command of a page names cells by patterns, and a ratio names its own.
func TestChoose_TakesPatterns(t *testing.T) {
	t.Parallel()
	for only, want := range map[string][]string{
		"shards/one/*, shards/client/plain*": {"shards/one/plain/uniform/64", "shards/one/combined/uniform/64", "shards/client/plain/uniform/64"},
		"combined_64_*":                      {"combined-noflush/uniform/64", "redis/uniform/64"},
		"npm/pl*64":                          {"npm/plain/uniform/64", "npm/plain/hot/64"},
		"held_to_*": { // and so on, of make bench-slots
			"bare/keyed", "bare/held", "bare/keyed-hot", "bare/held-hot", "held/uniform/64", "held-redis/uniform/64", "held/hot/64", "held-redis/hot/64",
		},
	} {
		cells, _, err := choose(only)
		require.NoError(t, err)
		require.Equal(t, want, cells)
	}
	_, _, err := choose("combined_64_*,typo")
	require.ErrorContains(t, err, "typo")
	cells, _, err := choose("")
	require.NoError(t, err)
	require.NotContains(t, cells, "shards/one/plain/uniform/64")
}

// A process of this test binary obeys; what it counts is what it was granted.
func TestElsewhere_TellsWhatCallersOfAllProcessesGot(t *testing.T) {
	t.Parallel()
	executable, err := os.Executable()
	require.NoError(t, err)
	e, err := start(t.Context(), 3, executable, "-test.run=^TestElsewhere_Obeys$", "obey")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, e.close()) })
	for _, callers := range []int{1, 8} {
		var s sample
		for s[rate] == 0 { // on a slow machine a window may have no answer
			s, err = e.run(t.Context(), callers, "hot", 100*time.Millisecond)
			require.NoError(t, err)
		}
		require.LessOrEqual(t, s[rate], 1000*float64(callers), "each call takes a millisecond")
	}
	_, err = e.run(t.Context(), 3, "uniform", time.Millisecond)
	require.ErrorContains(t, err, errDenied.Error(), "a process tells what went wrong")
}

func TestElsewhere_Obeys(*testing.T) {
	if flag.Arg(0) != "obey" {
		return
	}
	_ = obey(context.Background(), func(_ context.Context, key string) error {
		if key != hotKey {
			return errDenied
		}
		time.Sleep(time.Millisecond)
		return nil
	})
	os.Exit(0)
}

// Not how much later it comes: that is the machine's affair.
func TestLatency_IsNeverLessAndChangesNothing(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	require.NoError(t, err)
	defer listener.Close()
	const added = 4 * time.Millisecond
	client, err := latency(added).dial(t.Context(), "unix", listener.Addr().String())
	require.NoError(t, err)
	server, err := listener.Accept()
	require.NoError(t, err)

	for _, way := range []struct{ from, to net.Conn }{{client, server}, {server, client}} {
		message := []byte(strings.Repeat("0123456", 50_000)) // more than a piece
		begin, received := time.Now(), make([]byte, len(message))
		go func() { _, _ = way.from.Write(message) }()
		_, err := io.ReadFull(way.to, received)
		require.NoError(t, err)
		require.GreaterOrEqual(t, time.Since(begin), added/2, "half of it each way")
		require.Equal(t, message, received)
	}
	server.Close()
	_, err = client.Read(make([]byte, 1))
	require.ErrorIs(t, err, io.EOF)
}
