package main

import (
	"fmt"
	"runtime/debug"

	"github.com/spf13/cobra"
)

func (p *program) version() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Say which release this program is",
		Args:  exactly(0),
		RunE: func(c *cobra.Command, _ []string) error {
			var v struct {
				Version string `json:"version"`
				Go      string `json:"go"`
			}
			if info, ok := debug.ReadBuildInfo(); ok {
				v.Version, v.Go = info.Main.Version, info.GoVersion
			}
			return p.print(c, v, fmt.Sprintf("pgratelimit %s, built with %s", v.Version, v.Go))
		},
	}
}
