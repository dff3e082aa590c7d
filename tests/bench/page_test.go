package main

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const performancePage = "../../docs/performance.md"

// No figure of the page is written by hand: make bench-page writes them.
func TestPage_HasTheFiguresOfTheResults(t *testing.T) {
	t.Parallel()
	all, err := readResults("results")
	require.NoError(t, err)
	page, err := os.ReadFile(performancePage)
	require.NoError(t, err)
	next, err := renewPage(string(page), all)
	require.NoError(t, err)
	require.Equal(t, next, string(page), "make bench-page")
	for name := range pageBlocks {
		require.Contains(t, string(page), "<!-- bench:"+name+" -->")
	}
}

// A row of the page whose measure is misspelt would never have a figure.
func TestPage_ShowsMeasuresThatThereAre(t *testing.T) {
	t.Parallel()
	r := report{Machine: map[string]string{"machine": "2 cores of a processor, 24 GB"}, Ratios: map[string]span{}, Cells: map[string]sample{}}
	cells, chosen, err := choose("*", experiments(nil))
	require.NoError(t, err)
	for _, cell := range cells {
		r.Cells[cell] = sample{}
		for _, metric := range []string{rate, p99, cpuServer, cpuClient, "bytes", "to_formula"} {
			r.Cells[cell][metric] = 12345
		}
	}
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
		whole := strings.HasPrefix(block, "|") && !strings.Contains(block, "–")
		require.Equal(t, whole, slices.Contains(processor{&r, "bench"}.tables(), block), name)
	}
	require.Empty(t, processor{&report{}, "bench"}.tables(), "no table without figures")
}

func TestRatios_AreOfCellsThatThereAre(t *testing.T) {
	t.Parallel()
	cells, _, err := choose("*", experiments(nil))
	require.NoError(t, err)
	for _, r := range ratios {
		require.Subset(t, cells, r.cells(), r.name)
	}
}

// The command of docs/sharding.md names cells, and a ratio names its own.
func TestChoose_TakesPatterns(t *testing.T) {
	t.Parallel()
	for only, want := range map[string][]string{
		"shards/one/*, shards/client/plain": {"shards/one/plain", "shards/one/combined", "shards/client/plain"},
		"combined_64_*":                     {"combined-noflush/uniform/64", "redis/uniform/64"},
		"npm/pl*64":                         {"npm/plain/uniform/64", "npm/plain/hot/64"},
		"held_to_*": { // and so on, of make bench-slots
			"bare/keyed", "bare/held", "bare/keyed-hot", "bare/held-hot", "held/uniform/64", "held-redis/uniform/64", "held/hot/64", "held-redis/hot/64",
		},
	} {
		cells, _, err := choose(only, experiments(nil))
		require.NoError(t, err)
		require.Equal(t, want, cells)
	}
	_, _, err := choose("combined_64_*,typo", experiments(nil))
	require.ErrorContains(t, err, "typo")
	cells, _, err := choose("", experiments(nil))
	require.NoError(t, err)
	require.NotContains(t, cells, "shards/one/plain")
}

func TestPage_RefusesBlocksThatNobodyWrites(t *testing.T) {
	t.Parallel()
	for _, page := range []string{"<!-- bench:unknown -->\n<!-- end -->\n", "<!-- bench:summary -->\n", "<!-- bench:Summary -->\n<!-- end -->\n"} {
		_, err := renewPage(page, nil)
		require.Error(t, err, page)
	}
}
