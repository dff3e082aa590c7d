package policyfile

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
)

// ErrDifference is what a dry run returns when there is something to change. It has been shown.
var ErrDifference = errors.New("the database differs from the file")

// A ShownError has been shown: the mistakes of a file in JSON.
type ShownError struct{ error }

// Unwrap returns the error.
func (e ShownError) Unwrap() error { return e.error }

// A Target is a database that a file is applied to.
type Target struct {
	*pgx.Conn
	Name string                // of one of several, which the output has
	Has  func(key string) bool // as in [Options]
}

// Command returns the command apply. It connects when the file has been read without a mistake, and closes the
// connections. The error is for the program to print, but for [ErrDifference] and a [ShownError].
func Command(connect func(context.Context) ([]Target, error)) *cobra.Command {
	a := applier{connect: connect}
	command := &cobra.Command{
		Use:   "apply FILE",
		Short: "Make the policies and overrides of a database what a file says",
		Long: `Make the policies and overrides of a database what a file says, in one transaction. Of
shards, each has a transaction of its own, and the overrides of its keys.

Shows what changes: + is created, ~ is changed, - is dropped. FILE may be - for standard input.
The policies are also those that Envoy's rules of the file describe. What the file does not
have stays without --prune; overrides that it does not have are listed.

Ends with 0 when the database is as the file says, and with 2 when --dry-run has found a
difference, which is also an override that the file does not have. After an error nothing has been changed, or of shards only those before it.`,
		Example: `  pgratelimit apply limits.yaml --env production --dry-run
  pgratelimit apply limits.yaml --env production`,
		Args:          cobra.ExactArgs(1),
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.run(cmd.Context(), cmd.InOrStdin(), cmd.OutOrStdout(), args[0])
		},
	}
	flags := command.Flags()
	flags.StringVar(&a.options.Environment, "env", "", "apply what this environment of the file replaces, too")
	flags.Var(prune{&a.options}, "prune", "drop policies that the file does not have, with all that belongs to them; overrides with --prune=overrides, and both with --prune=policies,overrides")
	flags.Lookup("prune").NoOptDefVal = "policies"
	flags.BoolVar(&a.dryRun, "dry-run", false, "show the difference and change nothing; end with 2 if there is one")
	flags.BoolVar(&a.json, "json", false, "write JSON: changes, or the problems of the file")
	return command
}

// prune is a flag that says what is dropped.
type prune struct{ *Options }

func (p prune) Set(value string) error {
	for what := range strings.SplitSeq(value, ",") {
		switch what {
		case "policies":
			p.Prune = true
		case "overrides":
			p.PruneOverrides = true
		default:
			return errors.New("policies, overrides, or policies,overrides")
		}
	}
	return nil
}

func (p prune) String() string { return "" }
func (p prune) Type() string   { return "what" }

type applier struct {
	connect func(context.Context) ([]Target, error)
	options Options
	dryRun  bool
	json    bool
}

func (a *applier) run(ctx context.Context, in io.Reader, out io.Writer, path string) error {
	file, err := a.read(in, path)
	if err != nil {
		return a.fail(out, err)
	}
	targets, err := a.connect(ctx)
	if err != nil {
		return err
	}
	defer func() {
		for _, t := range targets {
			t.Close(context.WithoutCancel(ctx))
		}
	}()
	differs := false
	for _, t := range targets {
		d, err := a.difference(ctx, t, file)
		if err == nil {
			err = a.report(out, t, d)
		}
		if err != nil {
			return a.fail(out, t.failed(err))
		}
		differs = differs || !d.Empty() || d.Drift != nil
	}
	if a.dryRun && differs {
		return ErrDifference
	}
	return nil
}

func (t Target) failed(err error) error {
	if t.Name == "" {
		return err
	}
	return fmt.Errorf("%s: %w", t.Name, err)
}

func (a *applier) read(in io.Reader, path string) (*File, error) {
	name, data, err := read(in, path)
	if err != nil {
		return nil, err
	}
	file, err := Parse(name, data)
	if err != nil {
		return nil, err
	}
	_, err = file.Rules(a.options.Environment)
	return file, err
}

func (a *applier) difference(ctx context.Context, t Target, file *File) (*Difference, error) {
	options := a.options
	options.Has = t.Has
	if a.dryRun {
		return Plan(ctx, t.Conn, file, options)
	}
	return Apply(ctx, t.Conn, file, options)
}

// read reads a file, or standard input, and not much more of it than may be parsed.
func read(in io.Reader, path string) (name string, data []byte, err error) {
	name = "standard input"
	if path != "-" {
		name = path
		file, err := os.Open(path)
		if err != nil {
			return "", nil, fmt.Errorf("the policy file: %w", err)
		}
		defer file.Close()
		in = file
	}
	if data, err = io.ReadAll(io.LimitReader(in, MaxBytes+1)); err != nil {
		return "", nil, fmt.Errorf("the policy file: %w", err)
	}
	return name, data, nil
}

// fail leaves errors to the program, but the mistakes of the file in JSON.
func (a *applier) fail(out io.Writer, err error) error {
	var problems Problems
	if !a.json || !errors.As(err, &problems) {
		return err
	}
	if failed := writeJSON(out, struct {
		Problems Problems `json:"problems"`
	}{problems}); failed != nil {
		return errors.Join(err, failed)
	}
	return ShownError{err}
}

func (a *applier) report(out io.Writer, t Target, d *Difference) error {
	if a.json {
		return writeJSON(out, struct {
			Database string `json:"database,omitempty"`
			Applied  bool   `json:"applied"`
			*Difference
		}{t.Name, !a.dryRun, d})
	}
	if t.Name != "" {
		if _, err := fmt.Fprintf(out, "%s: ", t.Name); err != nil {
			return err
		}
		if !d.Empty() || d.Drift != nil {
			fmt.Fprintln(out)
		}
	}
	_, err := fmt.Fprint(out, d, a.summary(d))
	return err
}

func (a *applier) summary(d *Difference) string {
	drift := ""
	if d.Drift != nil {
		drift = "The database has " + count(int64(len(d.Drift)), "override") + " that the file does not have: --prune=overrides removes them.\n"
	}
	switch n := count(int64(len(d.Changes)), "change"); {
	case d.Empty() && drift == "":
		return "The database is as the file says.\n"
	case d.Empty():
		return drift
	case a.dryRun:
		return n + ", not made: this is a dry run.\n" + drift
	default:
		return n + " made.\n" + drift
	}
}

func writeJSON(out io.Writer, value any) error {
	encoder := json.NewEncoder(out)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	return encoder.Encode(value)
}
