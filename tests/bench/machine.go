package main

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
)

// describe tells what was measured on: the machine and the versions, and the server's settings that
// are not its defaults.
func (l *lab) describe(ctx context.Context) (machine, settings map[string]string, err error) {
	kernel, _ := os.ReadFile("/proc/sys/kernel/osrelease")
	machine = map[string]string{
		"machine": fmt.Sprintf("%d cores of %s, %.0f GB", runtime.NumCPU(), lineOf("/proc/cpuinfo", "model name"), float64(memory())/1024),
		"kernel":  "Linux " + strings.TrimSpace(string(kernel)),
		"system":  strings.Trim(lineOf("/etc/os-release", "PRETTY_NAME"), `"`),
		"Go":      runtime.Version() + modules("github.com/jackc/pgx/v5", "github.com/redis/go-redis/v9", "github.com/go-redis/redis_rate/v10"),
	}
	for _, server := range l.redis {
		machine["Redis"] = server.version + ", unix socket, go-redis' default of connections, no snapshots"
	}
	if l.pg == nil {
		return machine, nil, nil
	}
	machine["PostgreSQL"] = fmt.Sprintf("%s, unix socket, %d connections, %d where commits are flushed", l.pg.Version, connections, connectionsFlushed)
	settings, err = l.pg.settings(ctx)
	return machine, settings, err
}

func (pg *postgres) settings(ctx context.Context) (map[string]string, error) {
	conn, err := pgx.Connect(ctx, pg.URL(""))
	if err != nil {
		return nil, err
	}
	defer conn.Close(ctx)
	rows, err := conn.Query(ctx, `
		select name, current_setting(name)
		  from pg_settings
		 where source = 'configuration file'
		   and name !~ '^(lc_|default_text_search|unix_socket|log_timezone|TimeZone|DateStyle|listen)'`)
	if err != nil {
		return nil, err
	}
	settings := map[string]string{}
	var name, value string
	_, err = pgx.ForEachRow(rows, []any{&name, &value}, func() error {
		settings[name] = value
		return nil
	})
	return settings, err
}

// lineOf returns the value of the first line of a file that begins with a name.
func lineOf(file, name string) string {
	text, _ := os.ReadFile(file)
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, name); ok {
			return strings.TrimSpace(strings.TrimLeft(rest, " \t:="))
		}
	}
	return "unknown"
}

func modules(paths ...string) (text string) {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return ""
	}
	for _, module := range info.Deps {
		if slices.Contains(paths, module.Path) {
			text += ", " + strings.TrimPrefix(module.Path, "github.com/") + " " + module.Version
		}
	}
	return text
}
