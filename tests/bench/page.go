package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// The page docs/performance.md is prose with blocks between comments, <!-- bench:NAME --> and <!-- end -->. A block has a table from the
// results of each processor, one after another. No figure is written by hand.

// A processor is the results of one, and the name of their files.
type processor struct {
	*report
	file string
}

func (p processor) title() string {
	_, name, _ := strings.Cut(p.Machine["machine"], " of ")
	name, _, _ = strings.Cut(name, ",")
	return strings.TrimSpace(strings.NewReplacer("(R)", "", "(TM)", "", " Processor", "").Replace(name))
}

// readResults returns those of a directory: bench.json first.
func readResults(dir string) (all []processor, err error) {
	files := must(filepath.Glob(filepath.Join(dir, "bench*.json")))
	slices.SortFunc(files, func(a, b string) int {
		return strings.Compare(strings.TrimSuffix(a, ".json"), strings.TrimSuffix(b, ".json"))
	})
	for _, file := range files {
		text := must(os.ReadFile(file))
		p := processor{new(report), strings.TrimSuffix(filepath.Base(file), ".json")}
		if err := json.Unmarshal(text, p.report); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		if text, err = os.ReadFile(filepath.Join(dir, strings.Replace(p.file, "bench", "redis", 1)+".json")); err == nil {
			var runs report // several, for the ratios to Redis
			if err := json.Unmarshal(text, &runs); err != nil {
				return nil, fmt.Errorf("%s, ratios to Redis: %w", file, err)
			}
			maps.Copy(p.Ratios, runs.Ratios)
		}
		all = append(all, p)
	}
	if len(all) == 0 {
		return nil, errors.New("no results in " + dir)
	}
	return all, nil
}

var pageBlock = regexp.MustCompile(`(?s)(<!-- bench:([a-z]+) -->\n)(.*?)(<!-- end -->\n)`)

func renewPage(page string, all []processor) (_ string, err error) {
	if strings.Count(page, "<!-- bench:") != len(pageBlock.FindAllString(page, -1)) {
		return "", errors.New("a block of the page does not end, or has a name of other than small letters")
	}
	page = pageBlock.ReplaceAllStringFunc(page, func(block string) string {
		part := pageBlock.FindStringSubmatch(block)
		write := pageBlocks[part[2]]
		if write == nil {
			err = errors.Join(err, fmt.Errorf("the page has a block %q, which pageBlocks lacks", part[2]))
			return block
		}
		var texts []string
		for _, p := range all {
			if text := write(p); text != "" {
				texts = append(texts, text)
			}
		}
		return part[1] + strings.Join(texts, "\n") + part[4]
	})
	return page, err
}

func rewritePage(file, results string) error {
	all := must(readResults(results))
	page := must(os.ReadFile(file))
	next := must(renewPage(string(page), all))
	return os.WriteFile(file, []byte(next), 0o644)
}

// pageBlocks has a table for each block but machines: in the rows are measures, with * where the columns differ.
var pageBlocks = map[string]func(processor) string{
	"machines": machine,
	"summary": table("", []pageColumn{
		{"1 caller, many keys", "uniform/1/rate"}, {"16 callers", "uniform/16/rate"},
		{"64 callers", "uniform/64/rate"}, {"256 callers", "uniform/256/rate"},
		{"64 callers, one key", "hot/64/rate"}, {"p99 in ms", "uniform/64/p99"},
	}, []pageRow{
		{"**prefetched**", "prefetch/prefetcher/*"},
		{"**combined**", "combined-noflush/*"},
		{"the same, flushed", "combined-flush/*"},
		{"plain", "plain-noflush/*"},
		{"the same, flushed", "plain-flush/*"},
		{"redis_rate", "redis/*"},
		{"the same, appendfsync always", "redis-aof/*"},
		{"redis_rate pipelined", "redis-pipelined/*"},
		{"the same, appendfsync always", "redis-aof-pipelined/*"},
		{"SQL of five statements", "statements/*"},
	}),
	"redis": table("combined, to redis_rate, five runs", []pageColumn{{"median", ""}, {"least", "/from"}, {"most", "/to"}}, []pageRow{
		{"16 callers, many keys", "combined_16_many_keys_to_redis*"},
		{"64 callers, many keys", "combined_64_many_keys_to_redis*"},
		{"the same, p99", "combined_64_p99_to_redis*"},
		{"256 callers, many keys", "combined_256_many_keys_to_redis*"},
		{"256 callers, many keys, flushed", "combined_256_many_keys_flushed_to_redis*"},
		{"256 callers, one key", "combined_256_hot_key_to_redis*"},
		{"256 callers, one key, flushed", "combined_256_hot_key_flushed_to_redis*"},
	}),
	"joint": table("a request of three limits", byCallers, []pageRow{
		{"`Combiner.AcquireAll`, all or nothing", "joint-combined-noflush/uniform/*"},
		{"Redis, one script, all or nothing", "joint-script/uniform/*"},
		{"the same, pipelined", "joint-script-pipelined/uniform/*"},
	}),
	"denied": table("decisions per second", []pageColumn{
		{"64 callers, many keys", "uniform/64/rate"}, {"256 callers, many keys", "uniform/256/rate"}, {"256 callers, one key", "hot/256/rate"},
	}, []pageRow{
		{"half denied: combined", "half-combined/*"},
		{"with a denial cache", "half-cached/*"},
		{"redis_rate", "half-redis/*"},
		{"99 of 100 denied: combined", "flood-combined/*"},
		{"with a denial cache", "flood-cached/*"},
		{"redis_rate", "flood-redis/*"},
	}),
	"distance": table("64 callers", []pageColumn{{"here", ""}, {"1 ms away", "-1ms"}}, []pageRow{
		{"prefetched, one key", "prefetch/prefetcher*/hot/64/rate"},
		{"combined, one key", "prefetch/combined*/hot/64/rate"},
		{"redis_rate, one key", "prefetch/redis*/hot/64/rate"},
		{"combined, many keys", "prefetch/combined*/uniform/64/rate"},
		{"redis_rate, many keys", "prefetch/redis*/uniform/64/rate"},
		{"redis_rate pipelined, many keys", "prefetch/redis-pipelined*/uniform/64/rate"},
	}),
	"processes": table("64 callers, one key", []pageColumn{{"four processes", "rate"}}, []pageRow{
		{"prefetched", "processes/prefetcher/hot/64/*"},
		{"combined", "processes/combined/hot/64/*"},
		{"plain", "processes/plain/hot/64/*"},
		{"redis_rate", "processes/redis/hot/64/*"},
	}),
	"served": table("many keys", byCallers, []pageRow{
		{"`pgratelimit serve`, gRPC", "served/grpc/uniform/*"},
		{"the same, `AcquireMany`, 32 callers a call", "served/many/uniform/*"},
		{"the same, `AcquireStream`, 32 callers a message", "served/stream/uniform/*"},
		{"`pgratelimit serve`, JSON", "served/json/uniform/*"},
		{"Envoy's reference service on Redis, gRPC", "served/envoy/uniform/*"},
	}),
	"node": table("Node.js", byCallers, []pageRow{
		{"`Combiner`, many keys", "npm/combined/uniform/*"},
		{"`Limiter`, many keys", "npm/plain/uniform/*"},
		{"rate-limiter-flexible, many keys", "npm/rate-limiter-flexible/uniform/*"},
		{"`Combiner`, one key", "npm/combined/hot/*"},
		{"`Limiter`, one key", "npm/plain/hot/*"},
		{"rate-limiter-flexible, one key", "npm/rate-limiter-flexible/hot/*"},
	}),
	"python": table("Python, asyncpg", byCallers, []pageRow{
		{"`Combiner`, many keys", "python/combined/uniform/*"},
		{"`AsyncLimiter`, many keys", "python/plain/uniform/*"},
		{"`Combiner`, one key", "python/combined/hot/*"},
		{"`AsyncLimiter`, one key", "python/plain/hot/*"},
	}),
	"costs": table("plain calls", ratioOf, []pageRow{
		{"acquire, to a bare update of one row", "acquire_to_bare_update"},
		{"denial, to a bare select of one row", "denied_to_bare_select"},
		{"acquire with an idempotency key, to one without", "keyed_to_unkeyed"},
		{"the same combined, 64 callers", "keyed_combined_64_to_unkeyed"},
		{"acquire and settle, to acquire, with an idempotency key", "settled_to_keyed"},
		{"insert into a guarded table, to an unguarded one", "guarded_to_insert"},
		{"acquire among 10 million buckets, to 10 thousand", "buckets_10m_to_10k"},
		{"acquire beside clean-up, to without", "acquire_beside_cleanup"},
		{"combined on one key after 60 s of an old snapshot, to before", "hot_key_under_snapshot"},
	}),
	"slots": table("hold and release, cycles per second", []pageColumn{{"many keys", "uniform"}, {"one key", "hot"}}, []pageRow{
		{"`client.Limiter`, 64 callers", "held/*/64/rate"},
		{"Redis, 64 callers", "held-redis/*/64/rate"},
	}),
	"slotsratios": table("hold and release", []pageColumn{{"many keys", ""}, {"one key", "-hot"}}, []pageRow{
		{"64 callers, to Redis", "held_to_redis*"},
		{"the same beside a snapshot, to without", "held_under_snapshot*"},
		{"16 clients of pgbench, cycles per second", "bare/held*/rate"},
		{"the same, to acquires with an idempotency key", "held_to_keyed*"},
		{"the same beside a snapshot, to without", "held_pgbench_under_snapshot*"},
	}),
	"cpu": table("CPU microseconds of a decision", []pageColumn{{"server", "cpu_server"}, {"client", "cpu_client"}}, []pageRow{
		{"plain", "plain-noflush/uniform/256/*"},
		{"combined", "combined-noflush/uniform/256/*"},
		{"redis_rate", "redis/uniform/256/*"},
	}),
	"space": table("", []pageColumn{{"bytes", "bytes"}, {"to the formula", "to_formula"}}, []pageRow{
		{"a bucket", "buckets/1m/*"},
		{"a remembered grant", "bare/keyed/*"},
	}),
}

type (
	pageRow    struct{ title, measure string }
	pageColumn struct{ title, part string } // the part stands for the * of a row
)

var (
	byCallers = []pageColumn{{"64 callers", "64/rate"}, {"256 callers", "256/rate"}}
	ratioOf   = []pageColumn{{"ratio", ""}}
)

// text is a figure of a processor, or a dash.
func (p processor) text(measure string) string {
	value, ok := p.find(measure)
	switch {
	case !ok:
		return "–"
	case strings.HasSuffix(measure, "/"+rate):
		return thousands(value)
	case strings.HasSuffix(measure, "/"+p99):
		return figure(value / 1000)
	default:
		return figure(value)
	}
}

// table writes one, with a dash for each figure that was not measured, or nothing if none was.
func table(title string, columns []pageColumn, rows []pageRow) func(processor) string {
	return func(p processor) string {
		var b strings.Builder
		fmt.Fprintf(&b, "| %s |", strings.TrimPrefix(title+", "+p.title(), ", "))
		for _, c := range columns {
			fmt.Fprintf(&b, " %s |", c.title)
		}
		b.WriteString("\n|---|" + strings.Repeat("---:|", len(columns)) + "\n")
		measured := false
		for _, row := range rows {
			fmt.Fprintf(&b, "| %s |", row.title)
			for _, c := range columns {
				text := p.text(strings.ReplaceAll(row.measure, "*", c.part))
				measured = measured || text != "–"
				fmt.Fprintf(&b, " %s |", text)
			}
			b.WriteByte('\n')
		}
		if !measured {
			return ""
		}
		return b.String()
	}
}

func machine(p processor) string {
	return fmt.Sprintf("- **%s**, %s: PostgreSQL %s, Redis %s, %s; medians of %d rounds of %s. [All figures](../tests/bench/results/%s.json), [settings](../tests/bench/postgres.go).\n",
		p.Machine["machine"], p.When.Format("2 January 2006"), firstOf(p.Machine["PostgreSQL"]), firstOf(p.Machine["Redis"]),
		firstOf(p.Machine["Go"]), p.Rounds, p.Window, p.file)
}

// firstOf is the version that a line begins with.
func firstOf(text string) string {
	if end := strings.IndexAny(text, " ,"); end >= 0 {
		return text[:end]
	}
	return text
}
